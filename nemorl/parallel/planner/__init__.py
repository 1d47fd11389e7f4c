"""`nemorl plan`: which plans fit a model, estimated from sizes alone. Free of torch.

Others use `config.PlanConfig` and `command`; nothing here runs a model.
"""
