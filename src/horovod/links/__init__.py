"""A link assembles what an engine needs between ranks: channel, doorbell, peers, board and transport."""
