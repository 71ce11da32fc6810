"""Device code without a device: CUDA tensors that hold their numbers on the CPU (see fake_cuda)."""
