"""`python -m assay_smoke`: the command without its entry point installed."""

import sys

from assay_smoke.cli import main

sys.exit(main())
