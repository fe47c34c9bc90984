"""The backend of torch.distributed beside torch's own."""
