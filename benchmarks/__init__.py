"""`python -m benchmarks`: with these commands anyone can check the numbers that the project reports."""
