"""Language models: LoRA beside a base, chat templates, and decoding with a key-value cache."""
