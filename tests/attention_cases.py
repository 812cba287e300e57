"""
The sizes and dims that the tests of attention share.
"""

from __future__ import annotations
from returnn.tensor import Dim
from common import seq_dim

B, H, K, T = 3, 2, 16, 21
LENS = [21, 9, 1]
batch = Dim(B, name="batch")
time = seq_dim("time", LENS, batch)
