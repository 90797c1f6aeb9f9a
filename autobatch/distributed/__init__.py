"""Several ranks that train one batch together; the only package that imports torch.distributed."""
