"""`nemorl plan`: which plans fit a model, estimated from its sizes alone."""
