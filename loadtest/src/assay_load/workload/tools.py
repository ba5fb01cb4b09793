"""Tools that agentic sessions offer, in OpenAI's function format. The first one is what scripted
calls in a session's history use."""

from __future__ import annotations

from typing import Any


def _tool(name: str, description: str, properties: dict[str, str], *more: str) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {
                    key: {"type": "string", "description": about}
                    for key, about in properties.items()
                },
                "required": [next(iter(properties)), *more],
                "additionalProperties": False,
            },
        },
    }


TOOLS = [
    _tool(
        "read_file",
        "Read a text file of the working folder and return its content.",
        {"path": "Path of the file, relative to the working folder."},
    ),
    _tool(
        "search_text",
        "Search all files of the working folder for a regular expression; returns matching lines.",
        {"pattern": "The regular expression.", "folder": "Where to look; everywhere if left out."},
    ),
    _tool(
        "write_file",
        "Replace the content of a file, creating it if there is none.",
        {"path": "Path of the file.", "content": "The whole new content."},
        "content",
    ),
    _tool(
        "run_command",
        "Run a shell command in the working folder and return what it prints.",
        {"command": "The command line.", "timeout": "Seconds to wait for it, as a number."},
    ),
    _tool(
        "list_folder",
        "List the files and folders in a folder, one a line, folders with a slash at the end.",
        {"path": "Path of the folder."},
    ),
    _tool(
        "look_up",
        "Look a term up in the project's documentation and return the paragraphs that explain it.",
        {"term": "The term to look up.", "section": "The section to look in, if known."},
    ),
]
