"""How units are assigned to subnetworks."""
