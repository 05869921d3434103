"""ipykernel with the formatters for charts and data frames."""

import os
import sys

sys.path.append(os.path.dirname(os.path.abspath(__file__)))
if sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
    sys.path[0] = ""

from ipykernel.kernelapp import IPKernelApp  # noqa: E402

IPKernelApp.launch_instance(extra_extensions=["warren_display"])
