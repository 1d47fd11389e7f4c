"""How people start things.

`nemorl COMMAND` (main, commands, settings), and `nemorl.train` with the trainer classes (api).
`inference` uses a model without training it.
"""
