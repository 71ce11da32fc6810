"""How the servers of this project are asked: over HTTP, by those who have the access token.

`server` answers on asyncio with the parser of h11, `client` asks, `access` says who may, and
`frames` are tensors on the way: what comes is compared with what was asked for before it is read.
"""
