"""The tests mirror the tree: `tests/daemon/core/index/test_runs.py` tests `daemon/core/index/runs.py`."""
