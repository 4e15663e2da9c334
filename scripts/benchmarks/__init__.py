"""The tasks of `scripts/benchmark.py`: one module each, with `run(scale)`, and what they share."""
