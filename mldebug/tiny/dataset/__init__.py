"""tiny_dataset, pack and unpack: the ways data is stored, and which rows are taken."""
