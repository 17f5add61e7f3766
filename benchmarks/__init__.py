"""`python -m benchmarks`: how anyone convinces themselves of the numbers."""
