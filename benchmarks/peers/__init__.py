"""Our engine beside others: the same workloads on the same weights, in turns."""
