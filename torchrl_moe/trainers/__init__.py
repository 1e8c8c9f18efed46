"""Training MoE language models (namesake: ``torchrl.trainers``)."""
