"""`python -m rtlib`."""

import sys

from rtlib.cli import main

sys.exit(main())
