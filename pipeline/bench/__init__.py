"""Timing a tuned model beside what its user has today: eager PyTorch, CUDA graphs and `torch.compile`."""
