"""Training that goes on when ranks are lost or join; the part that all frameworks share.

sampler       which samples are left in an epoch, and which rank takes which of them; pure
"""
