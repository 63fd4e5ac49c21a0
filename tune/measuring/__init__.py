"""Checking and timing candidates: inputs, references, stopwatches, and the process that owns a device."""
