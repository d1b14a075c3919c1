"""Without a GPU, kernels run in Triton's interpreter, which has to be asked for before they are defined."""

import interpreter  # noqa: F401
