"""torchweld in torch.distributed: the ops take DTensors.

The rules are registered as soon as torch.distributed.tensor is imported.
"""
