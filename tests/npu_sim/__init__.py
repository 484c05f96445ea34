"""A simulator of the CANN libraries below the unmodified torch-npu wheel; `README.md` says what it shows.

- `build`: compiles ``src/`` into the libraries that the wheel links.
- `simulator`: makes device ``npu`` and backend ``hccl`` work in this process; faults and traces at run time.
- `aten`: the kernels.
- `run`: ``python -m tests.npu_sim.run --nproc 2 script.py``.
"""
