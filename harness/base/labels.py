"""Labels: the label of tokens without a loss."""

IGNORE_INDEX = -100  # as in torch.nn.functional.cross_entropy and transformers
