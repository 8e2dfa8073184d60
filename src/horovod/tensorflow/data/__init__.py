"""TensorFlow's data service beside a training job: see ``compute_service`` and ``compute_worker``."""
