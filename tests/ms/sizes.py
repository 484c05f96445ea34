"""Sizes of the tests' cells, which neither 2 nor 4 ranks divide evenly."""

WIDTH, HIDDEN, OUT = 6, 9, 3
