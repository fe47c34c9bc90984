"""ncclpy's backend of torch.distributed, compared with torch's own."""
