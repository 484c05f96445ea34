"""These tests need an environment of their own, with torch-npu (README.md). Elsewhere they aren't collected."""

from importlib.util import find_spec

# Only looked for: importing torch_npu would change torch for all other tests of the session.
collect_ignore_glob = [] if find_spec("torch_npu") else ["test_*.py"]
