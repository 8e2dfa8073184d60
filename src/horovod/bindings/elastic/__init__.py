"""Training that goes on when ranks are lost or join; the part that all frameworks share."""
