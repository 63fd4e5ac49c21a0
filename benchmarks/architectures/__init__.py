"""What `models.py` tries: small inline configurations of the architectures that people deploy, each as a user would."""
