"""Scripts that the tests run on simulated ranks: checks (see `tests.npu_sim.checks`) and what is traced."""
