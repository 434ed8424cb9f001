"""What transformers does behind our back: class patches, requests and versions."""
