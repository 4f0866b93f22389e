"""Models and data that come with the package: what `tiered train` and the benchmarks run."""
