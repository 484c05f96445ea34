"""hsdp-fn on MindSpore: not written yet."""
