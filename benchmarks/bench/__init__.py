"""What benchmarks are built of: a result file that fills row by row, tuning, meetings of contenders, limits."""
