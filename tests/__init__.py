"""The tests mirror the tree: `tests/daemon/core/test_index.py` tests `daemon/core/index.py`."""
