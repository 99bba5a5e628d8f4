"""Labels: what a batch has in the place of a token that is not trained on."""

IGNORE_INDEX = -100  # as torch.nn.functional.cross_entropy and transformers have it
