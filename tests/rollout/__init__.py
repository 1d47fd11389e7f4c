def talk(*texts: str) -> list[dict]:
    """Messages of the user and the model in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
