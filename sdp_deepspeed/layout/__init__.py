"""Where pieces lie: in flat segments of the exchange and in a rank's tensors."""
