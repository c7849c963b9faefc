"""tiny_tokenizer: the forms that vocabularies have, and how each is cut."""
