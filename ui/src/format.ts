// Quantities as text: the notation of the terminal and of report.html (etude.dashboard.formatting).

export const MISSING = "–";
const MINUS = "−";

type Maybe = number | null | undefined;

const isMissing = (value: Maybe): value is null | undefined => value === null || value === undefined || Number.isNaN(value);

/** A share as a percentage: 0.4264 → 42.6%. */
export function percent(share: Maybe, digits = 1): string {
  return isMissing(share) ? MISSING : `${(100 * share).toFixed(digits).replace("-", MINUS)}%`;
}

/** A difference of shares in percentage points, signed: 0.4264 → +42.6. */
export function points(difference: Maybe): string {
  return isMissing(difference) ? MISSING : `${difference < 0 ? MINUS : "+"}${Math.abs(100 * difference).toFixed(1)}`;
}

/** A whole number with thin gaps between thousands. */
export function count(value: Maybe): string {
  return isMissing(value) ? MISSING : Math.round(value).toString().replace(/\B(?=(\d{3})+$)/g, "\u202f").replace("-", MINUS);
}

/** A large number with three significant digits: 1234567 → 1.23M. */
export function brief(value: Maybe): string {
  if (isMissing(value)) return MISSING;
  for (const [scale, suffix] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]] as const) {
    if (Math.abs(value) >= scale) return `${significant(value / scale, 3)}${suffix}`;
  }
  return significant(value, 3);
}

/** A number with a fixed number of decimals. */
export function decimal(value: Maybe, digits = 2): string {
  return isMissing(value) ? MISSING : value.toFixed(digits).replace("-", MINUS);
}

/** A number of any magnitude: 0.0000031 → 3.1×10⁻⁶. */
export function small(value: Maybe, digits = 2): string {
  if (isMissing(value)) return MISSING;
  if (value === 0 || (Math.abs(value) >= 1e-3 && Math.abs(value) < 1e4)) return significant(value, digits);
  const [mantissa = "", exponent = "0"] = value.toExponential(digits - 1).split("e");
  return `${mantissa.replace("-", MINUS)}×10${superscript(Number(exponent))}`;
}

/** Bytes in decimal units: 1234567 → 1.23 MB. */
export function size(bytes: Maybe): string {
  if (isMissing(bytes)) return MISSING;
  for (const [scale, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]] as const) {
    if (bytes >= scale) return `${significant(bytes / scale, 3)} ${unit}`;
  }
  return `${Math.round(bytes)} B`;
}

/** Time as a clock shows it: 4000 → 1:06:40, 65 → 1:05. */
export function duration(seconds: Maybe): string {
  if (isMissing(seconds)) return MISSING;
  const whole = Math.round(seconds);
  const pad = (value: number) => String(value).padStart(2, "0");
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  return hours > 0 ? `${hours}:${pad(minutes)}:${pad(rest)}` : `${minutes}:${pad(rest)}`;
}

/** How long ago something was: 90 → 2 min ago. */
export function ago(seconds: number): string {
  if (seconds < 10) return "now";
  if (seconds < 90) return `${Math.round(seconds)} s ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  if (seconds < 129600) return `${Math.round(seconds / 3600)} h ago`;
  return `${Math.round(seconds / 86400)} days ago`;
}

export function significant(value: number, digits: number): string {
  return String(Number(value.toPrecision(digits))).replace("-", MINUS);
}

function superscript(value: number): string {
  return String(value).replace(/[-0-9]/g, (digit) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(digit)] ?? digit);
}
