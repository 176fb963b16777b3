EXCLUDED_CONDITIONS = ("inference_mode",)  # and not autocast: functions compute in dtypes of their own
