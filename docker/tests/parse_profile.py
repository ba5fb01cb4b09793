"""Has vLLM's own argument parser read profiles: `parse_profile.py FOLDER PROFILE...`

FOLDER is where the package `vllm` lies; "" is the installed one. Prints one JSON object, profile ->
what vLLM took from it. Ends as `vllm serve` does at the first flag or value that it does not know.
"""

import json
import sys

if sys.argv[1]:
    sys.path.insert(0, sys.argv[1])

from assay_kernels.launcher.vllm_main import answer_for_vllm

answer_for_vllm()

from vllm.entrypoints.cli.serve import ServeSubcommand  # noqa: E402
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402


def main() -> None:
    parser = FlexibleArgumentParser(prog="vllm")
    ServeSubcommand().subparser_init(parser.add_subparsers(required=True, dest="subparser"))
    found = {}
    for profile in sys.argv[2:]:
        taken = vars(parser.parse_args(["serve", "/model", "--config", profile]))
        found[profile] = {name: str(value) for name, value in taken.items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
