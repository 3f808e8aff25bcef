"""The only rooms that import torch: the block, its objectives, its training and its part in a sweep."""
