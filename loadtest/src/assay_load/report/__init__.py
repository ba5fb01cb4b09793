"""The result of a run, and what is made of it: JSON with a schema, HTML, PNG, Markdown."""
