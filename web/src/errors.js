/**
 * Every error that onward-web throws for a failure of its own domain. Bad values and types are `RangeError`
 * and `TypeError`.
 */

/** Base of every error that Onward defines. */
export class OnwardError extends Error {
  /** @param {string} message @param {ErrorOptions} [options] */
  constructor(message, options) {
    super(message, options);
    this.name = new.target.name;
  }
}

/** A model that cannot be used as given: missing, unreadable or not one of Onward's. */
export class ModelError extends OnwardError {}

/** A loss or gradient that is NaN or infinite; parameters were left as they were. */
export class NonFiniteError extends OnwardError {}

/** A checkpoint that cannot be read or written, with the field and the byte where known. */
export class CheckpointError extends OnwardError {
  /**
   * @param {string} path what was read, for the message
   * @param {string} reason
   * @param {{field?: string, offset?: number}} [place]
   */
  constructor(path, reason, { field = "", offset } = {}) {
    const where = field ? ` (${field}${offset === undefined ? "" : ` at byte ${offset}`})` : "";
    super(`checkpoint '${path}': ${reason}${where}`);
    this.path = path;
    this.reason = reason;
    this.field = field;
    this.offset = offset;
  }
}
