"""The setup that steps run on: device, model and data, in this process or in a child."""
