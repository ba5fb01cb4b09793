"""Reading a streamed chat completion as it arrives: HTTP/1.1, server-sent events, tokens.

Nothing here buffers: a token's time is the time at which the kernel handed its bytes over. All
streams of a process are read by one reactor, for a switch of greenlets per token would cost more
than all the rest.
"""
