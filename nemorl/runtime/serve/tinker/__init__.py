"""The Tinker protocol: a service that trains and samples for scripts of Tinker's SDK. Others use
`Service` and `routes`; what devices there are, it does not know.
"""
