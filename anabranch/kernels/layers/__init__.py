"""What models need beside attention: experts, routing, products with few rows, latent inputs."""
