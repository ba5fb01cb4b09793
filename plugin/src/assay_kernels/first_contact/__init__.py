"""The first run of the kernels on somebody's GPU: `assay-kernels first-contact`.

`environment` says what is there, `correctness` judges every kernel at every boundary, `speed` times
them beside what is installed, `sanitizer` runs small shapes under compute-sanitizer, `run` puts it
together in one JSON object to send back.
"""

from assay_kernels.first_contact.run import Options, first_contact, text

__all__ = ["Options", "first_contact", "text"]
