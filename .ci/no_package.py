"""What pip and other installers meet: this project is run from its folder and installs nowhere."""

import sys

sys.exit(
    "train_fsdp is run from its folder: ./setup.sh makes .venv there, .venv/bin/python train_fsdp.py --demo starts it"
)
